"""The instance registry: who is where, in which state, and what topology that makes."""
