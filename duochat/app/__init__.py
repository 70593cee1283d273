"""The app knows people: text, conversations, pictures. It never imports torch or llama_cpp."""
