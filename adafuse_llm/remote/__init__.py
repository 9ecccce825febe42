"""Use an engine on another machine: the client, and the data on the wire."""
