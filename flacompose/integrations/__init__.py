"""Models of other libraries on flacompose's ops and layers."""
