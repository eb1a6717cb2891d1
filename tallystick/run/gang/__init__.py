"""What a resident task does with an order, whoever gives it."""
