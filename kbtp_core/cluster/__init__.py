"""Many nodes: which node holds a key. Membership and the health of peers come with the central store's servers."""
