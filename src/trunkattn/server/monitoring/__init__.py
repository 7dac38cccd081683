"""What an operator watches: Prometheus metrics, lines of the log, the live page."""
