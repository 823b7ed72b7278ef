"""`lorafleet bench churn`: versions come, move, go back and retire under chats while workers are killed."""
