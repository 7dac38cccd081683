"""Pictures of the documentation as SVG: drawn in Python, for light and dark pages."""
