"""The machine: Java, processes, clocks, caches."""
