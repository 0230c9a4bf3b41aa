"""Long runs of real processes over the software RNIC; see `__main__`. Not collected by pytest."""
