"""The edit of statements inside one upstream function, as text and as compiled code."""
