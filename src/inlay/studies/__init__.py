"""From a grid of runs to tables and figures: one YAML file, cells that are run folders, engines that run them."""
