"""The WebSocket listener and its connections."""
