"""How clients and people find out what can be asked: the OpenAPI document, and a page that reads it."""
