"""The form that a request asks of its answers, and its trial in another process."""
