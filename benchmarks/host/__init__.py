"""What the host does: planning, launching, importing."""
