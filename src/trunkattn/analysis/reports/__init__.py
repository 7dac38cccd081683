"""An analysis in words, tables, charts and HTML."""
