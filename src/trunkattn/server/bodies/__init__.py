"""The bodies of requests: their fields, the types of these, and how bytes become them."""
