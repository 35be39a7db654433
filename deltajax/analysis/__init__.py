"""What a trained model routes."""
