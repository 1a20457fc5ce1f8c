"""A sequence of words that answers another: chatbots, translations."""
