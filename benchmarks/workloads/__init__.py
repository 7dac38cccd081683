"""What is measured: batches, models' shapes."""
