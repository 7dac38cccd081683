"""The programs that execute a work list."""
