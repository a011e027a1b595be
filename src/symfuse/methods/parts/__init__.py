"""Building blocks of merge methods: means, Gram matrices, sparse task vectors."""
