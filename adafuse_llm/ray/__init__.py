"""Members and servers on several machines, which Ray connects.

`actors` runs hosts of members in Ray actors, `loading` and `on_node` load members there, and
`serve` runs replicas of the server. Nothing else in the package needs Ray: `loading.members`
imports the first three when a member has the option ``ray``.
"""
