"""Operations on states and caches that need no plan: merging two attention states, writing new keys and values."""
