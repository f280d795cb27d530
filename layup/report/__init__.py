"""Reports: what a person looks at to see and trust a plan."""
