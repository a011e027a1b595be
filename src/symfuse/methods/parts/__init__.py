"""What merge methods are made of: means, Gram matrices, sparse task vectors."""
