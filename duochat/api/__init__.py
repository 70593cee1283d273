"""The same answers over HTTP, in OpenAI's form: what is asked, the answer in that form, who may ask, the server."""
