"""Which module of two engines differs first, and a certificate that none does."""
