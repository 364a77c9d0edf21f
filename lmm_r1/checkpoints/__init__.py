"""What a training run leaves behind: which saves are whole, their weights, and Hugging Face folders made of them."""
