"""The router: sends each request where most of its prompt is already cached, and says why."""
