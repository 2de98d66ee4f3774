"""Interoperability with real vLLM on a CPU: real instances, the real reference proxy, real connectors.

`scripts/test --interop` installs what is needed (once) and runs this. Each test module is one deployment, a
row of `docs/compatibility.md`; it sends the same requests as to a single plain vLLM, expects the same
greedy tokens, and demands proof that no picture was encoded anywhere but at the encoder."""
