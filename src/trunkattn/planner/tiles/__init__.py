"""Row tiles over the prefix forest: layout, cost, choice, overlap."""
