"""What a step measures: sums and maxima that merge, and the metrics formed from them."""
