"""What `make demo` runs: a small real model, a document, a conversation with a real server."""
