"""The client of the server: `RemoteEngine`, and the JSON forms that both sides use."""
