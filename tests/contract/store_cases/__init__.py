"""One module per kind of store, each with a `CASES` list: the contract suite finds them by itself."""
