"""Use an engine on another machine: the client, and the JSON between client and server."""
