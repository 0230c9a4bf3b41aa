"""What keeps blocks by key behind a target.

`identity`  how a value is named: namespaces, tenants, object keys, object ids, layout fingerprints
`embedded`  a cache in this process's own memory, for one machine without a server
"""
