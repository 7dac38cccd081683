"""Plug-ins for serving engines."""
