"""A client for the engine of ``adafuse serve``, and the JSON that client and server exchange."""
