"""The reference language engine process: batch, model, sampling, KV."""
