"""Operations on states and caches that stand alone: merging two attention states, writing new keys and values."""
