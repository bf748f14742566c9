"""Who and where am I: the cluster's description, roles, resolvers, topology and devices."""
