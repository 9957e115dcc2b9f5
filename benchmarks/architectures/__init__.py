"""Architectures of others, in small configurations, as their users train them."""
