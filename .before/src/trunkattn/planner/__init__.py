"""Block table -> prefix forest -> packs -> work list, in integers (PAT §5, §6)."""
