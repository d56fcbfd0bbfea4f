"""What is made of several inlays: fusions, mixtures, averages, folded weights."""
