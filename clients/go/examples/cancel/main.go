// cancel ADDRESS QUESTION NUM_EVENTS: reads so many events of an answer, then stops it.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"strconv"

	"slotwise"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 4 {
		log.Fatal("usage: cancel ADDRESS QUESTION NUM_EVENTS")
	}
	log.SetPrefix("error: ")
	numEvents, err := strconv.Atoi(os.Args[3])
	check(err)
	client, err := slotwise.Dial(os.Args[1])
	check(err)

	stream := client.Chat(context.Background(), os.Args[2])
	for i := 0; i < numEvents; i++ {
		event, err := stream.Recv()
		if err == io.EOF {
			break
		}
		check(err)
		fmt.Print(event.GetDelta().GetText())
	}
	// The end of the context does it too; client.Cancel(ctx, requestID) ends any other request.
	stream.Close()
	fmt.Printf("\ncancelled %s\n", stream.RequestID())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
