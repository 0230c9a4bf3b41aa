"""What keeps blocks by key behind a target.

`identity`  how a value is named: namespaces, tenants, object keys, object ids, layout fingerprints
`disk`      what a disk engine is; `slab` the one for use, `file_engine` the one for diagnosis, `disk_group` several as one
`quota`     how much each tenant may keep on a node
`embedded`  a cache in this process's own memory, for one machine without a server
"""
