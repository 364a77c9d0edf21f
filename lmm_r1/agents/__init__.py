"""What a policy talks to over several turns: environments and their tools."""
