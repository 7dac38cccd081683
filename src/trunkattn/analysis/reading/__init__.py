"""Logs read: from files to the requests that an analysis replays."""
