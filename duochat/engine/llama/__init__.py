"""llama.cpp: a cached tree over its sequences, and the lanes made of it."""
