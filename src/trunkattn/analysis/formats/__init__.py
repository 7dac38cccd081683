"""Formats of logs, one file each. `table.FORMATS` has a row for every one."""
