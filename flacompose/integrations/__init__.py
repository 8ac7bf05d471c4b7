"""Models of other libraries on flacompose's layers."""
