"""Everything that touches a matrix of models, [n, d] or [m, d], and nothing of learning.

`linalg`: distances, means, ranks. `order_statistics`: medians and trimmed means per coordinate. `nn`: work
over stacked models, convolutions and pools. May import `types` alone.
"""
